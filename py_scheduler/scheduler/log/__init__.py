"""From a fact to whoever hears of it: recorder, event log, acknowledgements, checkpoints."""
