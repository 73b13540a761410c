"""Digests and counts of request bodies and messages, by the native module of prompts/native. `_words.pyi` says more."""

from prompts._words import count_openings as count_openings
from prompts._words import digest32 as digest32
from prompts._words import digests as digests
from prompts._words import digests_among as digests_among
from prompts._words import message_words as message_words
