"""Embedding and head: the matrices with a row for each token. Ranks share the rows (Megatron-LM, 2019)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from engine.models.shard import Shard
from engine.models.weights import Weight, WeightScope


class Vocabulary:
    """Embedding and output head of a model: two matrices, or one, with a row for each token of the vocabulary.

    Under tensor parallelism each rank holds a range of the rows.
    """

    def __init__(
        self,
        body_scope: WeightScope,
        root_scope: WeightScope,
        embedding_name: str,
        head_name: str | None,
        vocab_size: int,
        hidden_size: int,
    ) -> None:
        """Declare the rows of both matrices that this rank holds, [rows, hidden_size].

        `embedding_name`: name in the checkpoint, inside `body_scope`, such as "embed_tokens.weight" in "model".
        `head_name`: name inside `root_scope`, such as "lm_head.weight"; None: the embedding is also the head.
        """
        self.vocab_size = vocab_size
        self._shard: Shard = root_scope.shard
        rows = self._shard.split_padded(vocab_size)
        ((self._first_token, self._end_token),) = rows.ranges  # a rank's rows are always one range
        self.embedding: Weight = body_scope.declare_weight(embedding_name, (rows, hidden_size))
        self.head = self.embedding if head_name is None else root_scope.declare_weight(head_name, (rows, hidden_size))
        self.head.is_linear = True  # so that it may be packed for fast multiplication
        self.head.is_embedding = head_name is None  # so that it is kept unpacked, too: rows of it are read

    def look_up(self, token_ids: Tensor) -> Tensor:
        """Look up embeddings, [tokens] -> [tokens, hidden]. All ranks get the same.

        Tokens of other ranks' rows count as zeros here, so the sum over the ranks is the embedding.
        """
        all_reduce_sum = self._shard.all_reduce_sum
        if all_reduce_sum is None:
            return F.embedding(token_ids, self.embedding.tensor)
        is_foreign = (token_ids < self._first_token) | (token_ids >= self._end_token)
        rows = (token_ids - self._first_token).masked_fill(is_foreign, 0)
        return all_reduce_sum(F.embedding(rows, self.embedding.tensor).masked_fill(is_foreign[:, None], 0.0))

    def compute_logits(self, hidden: Tensor) -> Tensor | None:
        """Compute logits: [rows, hidden] -> [rows, vocab] on rank 0, None on the others. All ranks must call this."""
        logits = self.head.multiply(hidden)
        if self._shard.gather is None:
            return logits
        padding = self._shard.compute_padded_share(self.vocab_size) - logits.shape[1]
        all_logits = self._shard.gather(F.pad(logits, (0, padding)) if padding else logits)
        return None if all_logits is None else all_logits[:, : self.vocab_size]
