"""Every operation in plain torch, as it is defined: what the other backends are compared with."""
