"""`python -m boxmaker.verify`."""

from boxmaker.verify.cli import main

main(prog_name="python -m boxmaker.verify")
