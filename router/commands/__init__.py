"""Commands that look at workers and routers from outside: `router check`, `router top`. They route nothing."""
