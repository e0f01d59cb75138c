"""Any bytes give tensors or a ConvertError: one body (`fuzz.body`), run by pytest, by hypothesis and by atheris."""
