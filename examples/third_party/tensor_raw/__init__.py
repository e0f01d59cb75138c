"""The format `raw`: four bytes `RAW1`, one line of JSON, the bytes of one tensor."""

from convert.formats import Format

FORMAT = Format(
    name="raw",
    suffixes=(".raw",),
    magic=((0, b"RAW1"),),  # offset and bytes that mark a file
    reader="tensor_raw.reader",  # "" if it cannot be read
    writer="tensor_raw.writer",  # "" if it cannot be written
    about="One tensor behind a line of JSON",
)
