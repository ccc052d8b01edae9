"""`python -m boxmaker.loopd`: the command, where it is not on the PATH."""

from boxmaker.loopd.cli import main

main(prog_name="loopd")
