"""`python -m boxmaker.bxctl`: the command, where it is not on the PATH."""

from boxmaker.bxctl.cli import main

main(prog_name="bxctl")
