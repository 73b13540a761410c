"""Model names and fair shares between tenants: pure decisions."""
