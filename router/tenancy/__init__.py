"""Who gets what: models under other names, turns between tenants. Values in, decisions out."""
