"""A checkpoint's tokenizer and chat template: from text, messages and requests to token ids.

Needs neither torch nor transformers. Ids equal those of transformers' `PreTrainedTokenizerFast` on the same files, so
the post-processor of tokenizer.json adds bos and eos, and `add_bos_token` of a config has no effect. Thread-safe;
encoding releases the interpreter's lock.
"""

from __future__ import annotations

import json
import logging
import os
from array import array
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

from fastokens import Tokenizer as FastTokenizer
from tokenizers import AddedToken
from tokenizers import Tokenizer as HfTokenizer

from prompts.chat_completions import CompletionRequest
from prompts.chat_rendering import ChatPrompt, render_chat
from prompts.chat_template import ChatTemplate, ChatTemplateError
from prompts.cut_tokens import CutTokens, find_cut_tokens
from prompts.errors import RequestError, bad_value
from prompts.fast_encoder import build_fast_tokenizer, encode_fast, encode_plain

# Callers encode in threads of their own; the library's pool would only fight them, and it warns at every fork.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

log = logging.getLogger("prompts")

ID_TYPE: Final = "I"
"""Type code of arrays of token ids."""
_FILE_NAMES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "chat_template.json",
    "generation_config.json", "config.json",
)  # fmt: skip
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenizerError(ValueError):
    """A checkpoint's tokenizer is missing or malformed; the message says which file and what is wrong."""


class Tokenizer:
    """Tokenizer of one model with its chat template. Build with `Tokenizer.load`; not changed afterwards."""

    def __init__(
        self,
        hf_tokenizer: HfTokenizer,
        *,
        template: ChatTemplate | None,
        eos_token_ids: tuple[int, ...],
        with_fast_encoder: bool = True,
    ) -> None:
        """Wrap a loaded tokenizer; build the fast encoder for it, if there can be one."""
        self.hf_tokenizer = hf_tokenizer
        """The tokenizer of the library `tokenizers`. It must not be changed."""
        self.chat_template = template
        self.eos_token_ids = eos_token_ids
        """Ids that end an answer."""
        added_tokens = hf_tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added_tokens.items() if token.special)

        vocabulary = hf_tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        """Largest id + 1, added tokens included."""
        self._fast_tokenizer = _build_fast_tokenizer(hf_tokenizer) if with_fast_encoder else None
        """None if texts are encoded by the library `tokenizers`, which is slower."""

    @classmethod
    def load(cls, path: str | Path, chat_template: str | None = None, *, with_fast_encoder: bool = True) -> Tokenizer:
        """Load the tokenizer and the chat template of a checkpoint's folder. Raises TokenizerError.

        `chat_template`: the text of a template that replaces the model's own, or the path of its file.
        `with_fast_encoder`: whether to build the fast encoder too, which takes a second for a large vocabulary.
        """
        folder = Path(path)
        hf_tokenizer = _load_hf_tokenizer(folder)
        config = _read_json(folder / "tokenizer_config.json")
        named_tokens = _add_configured_tokens(hf_tokenizer, folder, config)
        hf_tokenizer.no_truncation()
        hf_tokenizer.no_padding()
        try:
            template = _load_template(folder, config, chat_template, named_tokens)
        except ChatTemplateError as error:
            raise TokenizerError(f"{folder}: {error}") from error
        return cls(
            hf_tokenizer, template=template, with_fast_encoder=with_fast_encoder,
            eos_token_ids=_read_eos_ids(hf_tokenizer, folder, named_tokens),
        )  # fmt: skip

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text, in which names of special tokens become these tokens. Raises RequestError."""
        return self.encode_array(text, add_special_tokens).tolist()

    def encode_array(self, text: str, add_special_tokens: bool = True) -> array[int]:
        """Return the ids of a text as an array of `ID_TYPE`. Raises RequestError for a lone surrogate."""
        try:
            if self._fast_tokenizer is None:
                return array(ID_TYPE, encode_plain(self.hf_tokenizer, text, add_special_tokens=add_special_tokens))
            ids = array(ID_TYPE)
            ids.frombytes(encode_fast(self._fast_tokenizer, text, add_special_tokens=add_special_tokens))
            return ids
        except (UnicodeEncodeError, TypeError) as error:  # a lone surrogate; the library says TypeError
            raise RequestError(f"the text cannot be encoded as UTF-8: {error}") from error

    @cached_property
    def cut_tokens(self) -> CutTokens:
        """Added tokens before which any text may be cut."""
        return find_cut_tokens(self.hf_tokenizer)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ids. Incomplete or wrong UTF-8 becomes U+FFFD, and unknown ids are left out."""
        return str(self.hf_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def render_chat_text(self, request: ChatPrompt) -> str:
        """Return the prompt's text by the chat template. Raises RequestError."""
        if self.chat_template is None:
            raise RequestError(
                "this model has no chat template: start the server with --chat-template, or use /v1/completions",
                param="messages",
            )
        return render_chat(self.chat_template, request)

    def encode_chat(self, request: ChatPrompt) -> list[int]:
        """Return the prompt ids of a chat, up to its first image. Raises RequestError."""
        return self.encode(self.render_chat_text(request), add_special_tokens=bool(request.add_special_tokens))

    def encode_completion(self, request: CompletionRequest) -> list[list[int]]:
        """Return the ids of each prompt of a checked body. Raises RequestError for an id beyond the vocabulary."""
        prompt: Any = request.prompt
        if isinstance(prompt, list) and isinstance(prompt[0], int):
            return [self._check_token_ids("prompt", prompt)]
        return [
            self.encode(item, request.add_special_tokens is not False)
            if isinstance(item, str)
            else self._check_token_ids(f"prompt[{index}]", item)
            for index, item in enumerate([prompt] if isinstance(prompt, str) else prompt)
        ]

    def _check_token_ids(self, param: str, ids: list[int]) -> list[int]:
        for index, token_id in enumerate(ids):
            if token_id >= self.vocab_size:
                raise bad_value(f"{param}[{index}]", token_id, f"a token id in [0, {self.vocab_size})")
        return ids

    def id_to_token(self, token_id: int) -> str | None:
        """Return the token of an id as the vocabulary spells it (`Ġthe`); None for an unknown id."""
        token: str | None = self.hf_tokenizer.id_to_token(token_id)
        return token

    def token_to_id(self, token: str) -> int | None:
        token_id: int | None = self.hf_tokenizer.token_to_id(token)
        return token_id


def _build_fast_tokenizer(hf_tokenizer: HfTokenizer) -> FastTokenizer | None:
    try:
        return build_fast_tokenizer(hf_tokenizer)
    except ValueError as error:
        log.info("texts are encoded by the slower library `tokenizers`: %s", error)
        return None


def _load_hf_tokenizer(folder: Path) -> HfTokenizer:
    """Load the tokenizer.json of a checkpoint's folder. Raises TokenizerError, which says how to get such a file."""
    tokenizer_path = folder / "tokenizer.json"
    if not folder.is_dir():
        raise TokenizerError(f"{folder}: no such folder, expected a checkpoint with a tokenizer.json")
    if not tokenizer_path.is_file():
        other_formats = [path for pattern in ("*.model", "*.gguf", "tekken.json") for path in folder.glob(pattern)]
        if not other_formats:
            raise TokenizerError(f"{folder}: no tokenizer.json; give a folder that has one, --tokenizer FOLDER")
        names = ", ".join(sorted(path.name for path in other_formats))
        raise TokenizerError(
            f"{folder}: has {names} but no tokenizer.json; convert it "
            f"once with transformers: AutoTokenizer.from_pretrained(...).save_pretrained({str(folder)!r})"
        )
    try:
        return HfTokenizer.from_file(str(tokenizer_path))
    except Exception as error:
        raise TokenizerError(f"{tokenizer_path}: not a tokenizer of Hugging Face's `tokenizers`: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file; an empty one if there is no file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read_text(path))
    except ValueError as error:
        raise TokenizerError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: expected a JSON object")
    return value


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (ValueError, OSError) as error:
        raise TokenizerError(f"{path}: {error}") from error


def _read_token_text(value: Any) -> str | None:
    """Return the token of a config value, which is a string, or an object with content and flags."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) and text else None


def _make_added_token(value: Any, *, special: bool) -> AddedToken:
    """Make a token from a config value: its text, or an object with its text and flags.

    `special` is used if the value does not say whether the token is special. By default, a special token is found in
    the text as it was sent, not in the normalized text.
    """
    if not isinstance(value, dict):
        return AddedToken(value, special=special, normalized=False)
    flags = {name: bool(value.get(name, False)) for name in ("single_word", "lstrip", "rstrip")}
    is_special = bool(value.get("special", special))
    return AddedToken(value["content"], normalized=bool(value.get("normalized", not is_special)),
                      special=is_special, **flags)  # fmt: skip


def _add_configured_tokens(hf_tokenizer: HfTokenizer, folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Add the tokens of tokenizer_config.json that tokenizer.json lacks, in their order, which decides their ids.

    Return the texts of the named tokens, such as {"bos_token": "<s>"}. Raises TokenizerError for malformed tokens.
    """
    token_settings = dict(config)
    if not isinstance(config.get("added_tokens_decoder"), dict):  # an older checkpoint has its named tokens elsewhere
        token_settings.update(_read_json(folder / "special_tokens_map.json"))
    text_by_name = {name: _read_token_text(token_settings.get(name)) for name in _NAMED_TOKENS}
    named_tokens = {name: text for name, text in text_by_name.items() if text is not None}

    # Tokens as objects with flags come first: if a special token is listed twice, these flags count.
    tokens = [_make_added_token(value, special=False) for value in _list_token_objects(config, folder)]
    extra = token_settings.get("additional_special_tokens") or token_settings.get("extra_special_tokens") or ()
    unnamed_values = extra.values() if isinstance(extra, dict) else extra
    for value in (*(token_settings[name] for name in named_tokens), *unnamed_values):
        if _read_token_text(value) is not None:
            tokens.append(_make_added_token(value, special=True))

    existing_texts = {token.content for token in hf_tokenizer.get_added_tokens_decoder().values()}
    for token in tokens:
        if token.content not in existing_texts:
            existing_texts.add(token.content)
            add_tokens = hf_tokenizer.add_special_tokens if token.special else hf_tokenizer.add_tokens
            add_tokens([token])
    return named_tokens


def _list_token_objects(config: dict[str, Any], folder: Path) -> list[Any]:
    """Return the tokens of `added_tokens_decoder`, in the order of their ids. Raises TokenizerError.

    The config has them as {"151643": {"content": "<|endoftext|>", "special": true}, ...}; older configs have none.
    """
    tokens_by_id = config.get("added_tokens_decoder")
    if not isinstance(tokens_by_id, dict):
        return []
    if not all(key.isdigit() and _read_token_text(value) for key, value in tokens_by_id.items()):
        raise TokenizerError(f"{folder}/tokenizer_config.json: added_tokens_decoder: expected ids with token objects")
    return [tokens_by_id[key] for key in sorted(tokens_by_id, key=int)]


def _load_template(
    folder: Path, config: dict[str, Any], override: str | None, named_tokens: dict[str, str]
) -> ChatTemplate | None:
    """Load the chat template of a checkpoint's folder, or `override` instead; None if there is none.

    Files `*.jinja` take precedence over tokenizer_config.json (`config`), and this over chat_template.json. Raises
    TokenizerError or ChatTemplateError for a malformed template.
    """
    if override is not None:
        return ChatTemplate(_read_override(override), named_tokens)

    templates: Any = {path.stem: _read_text(path) for path in _list_named_templates(folder)}
    if (folder / "chat_template.jinja").is_file():
        templates["default"] = _read_text(folder / "chat_template.jinja")
    if not templates:
        templates = config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if templates is None:
        return None
    if isinstance(templates, list) and all(
        isinstance(item, dict) and {"name", "template"} <= set(item) for item in templates
    ):
        templates = {item["name"]: item["template"] for item in templates}
    if not isinstance(templates, (str, dict)):
        raise TokenizerError(
            f"{folder}: chat_template: got {type(templates).__name__}, expected a string or named templates"
        )
    return ChatTemplate(templates, named_tokens)


def _list_named_templates(folder: Path) -> list[Path]:
    """Return the files of a checkpoint's chat templates besides the default one."""
    return sorted((folder / "additional_chat_templates").glob("*.jinja"))


def _read_override(override: str) -> str:
    """Return the template of `--chat-template`, which is its text or a file's path. Raises TokenizerError."""
    if any(mark in override for mark in "{}\n"):
        return override
    try:
        return Path(override).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise TokenizerError(
            f"--chat-template {override!r}: expected a template or a file with one: {error}"
        ) from error


def _read_eos_ids(hf_tokenizer: HfTokenizer, folder: Path, named_tokens: dict[str, str]) -> tuple[int, ...]:
    """Return the ids that end an answer: the tokenizer's own, and those of generation_config.json, else config.json."""
    tokenizer_eos_id = hf_tokenizer.token_to_id(named_tokens["eos_token"]) if "eos_token" in named_tokens else None
    eos_ids: list[Any] = [tokenizer_eos_id]
    for name in ("generation_config.json", "config.json"):
        config = _read_json(folder / name)
        text_config = config.get("text_config")
        value = config.get("eos_token_id")
        if value is None and isinstance(text_config, dict):
            value = text_config.get("eos_token_id")
        if value is not None:
            eos_ids += value if isinstance(value, list) else [value]
            break
    return tuple(dict.fromkeys(token_id for token_id in eos_ids if type(token_id) is int))


class Checkpoint(NamedTuple):
    """The files that a tokenizer is loaded from, as they are at one time."""

    folder: str
    file_stamps: tuple[tuple[int, int], ...] = ()
    """Time of the last change, in ns, and size of each file."""


def find_checkpoint(name: str) -> Checkpoint | None:
    """Return the checkpoint with this path, or this name in the Hugging Face cache; None if it is not here."""
    folder = find_checkpoint_folder(name)
    if folder is None:
        return None
    paths = [folder / file_name for file_name in _FILE_NAMES] + _list_named_templates(folder)
    return Checkpoint(str(folder), tuple(_read_stamp(path) for path in paths))


def _read_stamp(path: Path) -> tuple[int, int]:
    """Return the time of a file's last change and its size; zeros if it cannot be read."""
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_size


def find_checkpoint_folder(name: str) -> Path | None:
    """Return the folder of a checkpoint, given its path or its name in the Hugging Face cache; None if it is not here.

    Nothing is downloaded.
    """
    try:
        path = Path(name).expanduser()
        if path.is_dir():
            return path
    except (OSError, RuntimeError, ValueError):  # a name too long, an unknown user's home, a zero byte
        return None
    hf_home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    # Unlike `Path.expanduser`, this raises nothing in a process without a home, as a container's user may be.
    cache_folder = Path(os.path.expanduser(os.environ.get("HF_HUB_CACHE") or f"{hf_home}/hub"))
    repository = cache_folder / f"models--{name.replace('/', '--')}"
    try:
        revision = (repository / "refs" / "main").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    snapshot = repository / "snapshots" / revision
    return snapshot if snapshot.is_dir() else None
