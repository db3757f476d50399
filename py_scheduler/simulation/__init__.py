"""Runs a server's scheduler in virtual time: the same engine, ledger, queue and placement, on a laptop and in seconds.

configuration, layout ─► app.build_simulated ─► engine ◄─ trainer ◄─ workload: drawn, or read from a trace
                                                  │  ▲
                              virtual time ───────┘  └── handler: as long as the workload says, or fails
"""
