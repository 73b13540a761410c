"""Routes that look at or change the router itself: health, models, metrics, workers, explanations, the dashboard.

Health, version, `/metrics` and the dashboard's empty page are for everybody who reaches the port, and `/v1/models` for
everybody with an API key. The other routes tell what is cached where and change who gets work:
router/app/api_keys.py says who may call them.
"""
