"""One module for each command: `add` gives its parser its words, `run` does what they say and returns the exit code.

`cli` lists the commands and imports the one that is named. `common` has what several use, and `views/` what the larger
ones show.
"""
