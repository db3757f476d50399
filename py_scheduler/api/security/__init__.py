"""Who may call: TLS, bearer tokens, rights."""
