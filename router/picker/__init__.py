"""Envoy's endpoint picker: what `router epp` says over the Endpoint Picker Protocol. Envoy carries the bytes.

The door: `PickerServer` (router/picker/server.py, which needs grpcio and xds-protos) and `PickerConfig`.
"""
