"""Who gets what: models under other names, turns between tenants, the ledger of tokens. Values in, decisions out."""
