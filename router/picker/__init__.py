"""Endpoint picker for Envoy: `router epp` chooses workers, and Envoy carries the bytes of requests and answers.

Others use `PickerServer` (router/picker/server.py, which needs grpcio and xds-protos) and `PickerConfig`.
"""
