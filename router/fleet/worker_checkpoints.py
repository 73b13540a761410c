"""Which checkpoint each worker has loaded, and so which tokenizer the router needs for a model.

A model keeps its name when its workers restart with another checkpoint, or with new files in its folder. The router
then reads the new tokenizer, once no worker that is up has the old files.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from prompts.tokenizer import Checkpoint, find_checkpoint
from router.decide.workers import Worker
from router.fleet.prober import WorkerFacts
from router.fleet.retries import run_with_timeout
from router.fleet.worker_settings import WorkerSettings
from router.prompting.model_tokenizers import ModelTokenizers

TOKENIZER_S_MAX = 60.0
"""Longest wait for the tokenizer of a model before its worker joins without."""


class WorkerCheckpoints:
    """Has the tokenizers of the workers' models loaded, and forgets one when its files were replaced."""

    def __init__(self, tokenizers: ModelTokenizers, workers: Mapping[str, Worker]) -> None:
        """`workers`: those that were reached, by id."""
        self._tokenizers = tokenizers
        self._workers = workers
        self._checkpoints: dict[str, dict[str, Checkpoint]] = {}
        """Worker -> base model -> files on this machine, as they were when the worker was found or had restarted."""

    async def update(
        self, settings: WorkerSettings, facts: WorkerFacts, *, is_restarted: bool, has_changed: bool
    ) -> None:
        """Load the tokenizers of a worker's models before it gets its first request, or if its files were replaced.

        `is_restarted`: its engine may have read other files than before. `has_changed`: its facts are new ones.
        """
        known = {} if is_restarted else self._checkpoints.get(settings.worker_id, {})
        self._checkpoints[settings.worker_id] = known | find_checkpoints(facts, known)
        is_replaced = self._forget_replaced(settings.worker_id, facts)
        if is_replaced or is_restarted or has_changed:
            for base in sorted({model.base for model in facts.spec.models}):
                await run_with_timeout(
                    TOKENIZER_S_MAX, self._tokenizers.discover(base, facts.roots.get(base), settings)
                )

    def remove_worker(self, settings: WorkerSettings) -> None:
        """Forget a worker. The tokenizers of its models stay."""
        self._checkpoints.pop(settings.worker_id, None)
        self._tokenizers.remove_worker(settings.url)

    def _forget_replaced(self, worker_id: str, facts: WorkerFacts) -> bool:
        """Forget the tokenizer of each model that a worker loaded from another checkpoint; return whether any was.

        The tokenizer stays while another worker uses the old files, or if the new ones are not on this machine.
        """
        is_replaced = False
        for base, checkpoint in self._checkpoints[worker_id].items():
            if not self._tokenizers.is_replaced(base, checkpoint) or self._is_loaded_elsewhere(base, worker_id):
                continue
            if find_checkpoint(facts.roots.get(base, checkpoint.folder)) == checkpoint:
                is_replaced = True
                self._tokenizers.forget(base)
        return is_replaced

    def _is_loaded_elsewhere(self, base: str, worker_id: str) -> bool:
        """Return whether another worker that is up has the files of the tokenizer that is loaded here."""
        return any(
            other_id != worker_id
            and base in checkpoint_by_model
            and not self._tokenizers.is_replaced(base, checkpoint_by_model[base])
            and other_id in self._workers
            and not self._workers[other_id].is_down
            for other_id, checkpoint_by_model in self._checkpoints.items()
        )


def find_checkpoints(facts: WorkerFacts, known_models: Collection[str] = ()) -> dict[str, Checkpoint]:
    """Return the files of a worker's base models, as they are now, for models that are not known and are here."""
    checkpoints = {}
    for base in ({model.base for model in facts.spec.models} & set(facts.roots)).difference(known_models):
        if (checkpoint := find_checkpoint(facts.roots[base])) is not None:
            checkpoints[base] = checkpoint
    return checkpoints
