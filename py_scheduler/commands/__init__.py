"""One module for each command: `add` gives its parser its words, `run` does what they say and returns the exit code.

`cli` lists the commands and imports the one that is named. Beside them stand what several use (`connection`, `console`,
`submissions`) and parts of one (`plan_view`, `report_data`, `report_plots`, `try_view`).
"""
