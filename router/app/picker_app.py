"""The application of the endpoint picker, for requests that a gateway carries."""

from __future__ import annotations

from router.app.dispatch import RequestDispatcher
from router.app.guard import ApiKeys
from router.http.request import HttpRequest
from router.picker.pick_exchange import PickExchange
from router.picker.picker_client import PickerClient


class PickerApp:
    """Chooses a worker for each request that Envoy asks about, whatever the request's URL path."""

    def __init__(self, dispatcher: RequestDispatcher) -> None:
        proxy = dispatcher.proxy
        self.limits = proxy.config.limits
        self.budget = proxy.budget
        self.scheduler = proxy.pool.scheduler
        self._keys = ApiKeys(proxy.config.api_keys)
        self._dispatcher = dispatcher
        self._metrics = proxy.metrics

    def pick(self, client: PickerClient, request: HttpRequest) -> None:
        """Start to choose a worker for a request. The choice may come after this call returns. Raises RequestError."""
        client.tenant = self._keys.find_tenant(client, request)
        self._dispatcher.dispatch(client, request, PickExchange)

    def record_rejection(self, status: int) -> None:
        self._metrics.http_errors[str(status)] += 1

    def record_crash(self, place: str, error: Exception) -> None:
        self._metrics.record_crash(place, error)
