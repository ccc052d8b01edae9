"""What crosses a boundary: values and their codecs, without I/O or a clock."""
