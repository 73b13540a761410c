"""Routes that look at or change the router itself: health, models, metrics, workers, explanations, the dashboard.

`/health`, `/metrics`, `/v1/models` and the dashboard's empty page are for everybody who reaches the port. The other
routes tell what is cached where and change who gets work: router/app/guard.py says who may call them.
"""
