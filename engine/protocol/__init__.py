"""The APIs that the engine serves: bodies become requests, generated answers become JSON or streams of events."""
