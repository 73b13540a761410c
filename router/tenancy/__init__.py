"""Names of models and turns between tenants. Values in, decisions out."""
