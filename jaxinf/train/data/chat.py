"""A model's own form of conversations: its chat template, and the answers in it.

Invariant: a template is a stranger's code. It is never run in this process; the one
that runs it (`chat_renderer.py`) is bounded in time, memory and output, and its answers
are checked like other data.
"""

import contextlib
import dataclasses
import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxinf.train.data.errors import DataError, optional_import

_RENDERER = Path(__file__).with_name("chat_renderer.py")
_MOST_CPU_S = 5  # for a conversation; it takes a millisecond
_MOST_MEMORY_BYTES = 1 << 30
_MOST_TEMPLATE_BYTES = 1 << 20
_MOST_ANSWER_BYTES = 1 << 28


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template that has not been run.

    Attributes:
      tokens: special tokens by name, such as ``bos_token``, which it may use.
    """

    where: str
    text: str
    tokens: Mapping[str, str]


def read_chat_template(
    folder: Path, config: Mapping[str, Any], tokens: Mapping[str, str]
) -> ChatTemplate | None:
    """Finds the template of a tokenizer; None if it has none.

    Args:
      folder: the tokenizer's folder; its `chat_template.jinja` comes first.

    Raises:
      DataError: the template is no text, or is too long.
    """
    path = folder / "chat_template.jinja"
    if path.is_file():
        with path.open("rb") as file:
            found: Any = file.read(_MOST_TEMPLATE_BYTES + 1).decode(errors="replace")
    else:
        path = folder / "tokenizer_config.json: chat_template"
        found = config.get("chat_template")
    if isinstance(found, list):  # several with names
        named = [t for t in found if isinstance(t, dict) and t.get("name") == "default"]
        found = named[0].get("template") if named else found
    if found is None:
        return None
    if not isinstance(found, str) or len(found) > _MOST_TEMPLATE_BYTES:
        raise DataError(
            f"{path}: expected a template of at most {_MOST_TEMPLATE_BYTES} bytes, or "
            f"a list with one named default, found {type(found).__name__}"
        )
    return ChatTemplate(str(path), found, tokens)


class ChatRenderer:
    """Renders conversations in a process of its own, which starts with the first one.

    Used from one thread. Close it to end the process.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._process: subprocess.Popen[bytes] | None = None

    def render(
        self, where: str, messages: Sequence[Mapping[str, str]], *, learn_all: bool
    ) -> list[tuple[str, bool]]:
        """Renders a conversation, and divides it into answers and the rest.

        An answer is the text that an assistant's message adds to the prompt: to the
        messages before it, rendered with the beginning of an answer.

        Args:
          learn_all: whether to leave it whole, as text to learn.

        Returns:
          Texts, which joined are the whole, and whether each is an answer.

        Raises:
          DataError: the template refuses the conversation, takes too long, or does not
            show which part is the answer.
        """
        whole = (len(messages), False)
        if learn_all:
            return [(self._texts(where, messages, [whole])[0], True)]
        answers = [n for n, m in enumerate(messages) if m["role"] == "assistant"]
        prefixes = [call for n in answers for call in ((n, True), (n + 1, False))]
        text, *parts = self._texts(where, messages, [whole, *prefixes])
        found: list[tuple[str, bool]] = []
        at = 0
        for number, prompt, through in zip(
            answers, parts[::2], parts[1::2], strict=True
        ):
            is_prefix = text.startswith(through) and through.startswith(prompt)
            if not is_prefix or not at <= len(prompt) < len(through):
                raise DataError(
                    f"{where}: expected the chat template {self._template.where} to "
                    "write each message behind those before it, found that message "
                    f"{number + 1} changes the text before it, or that later messages "
                    "change it; so its answer cannot be told from the prompt: give one "
                    "answer in each record, or --loss-on all"
                )
            found += [(text[at : len(prompt)], False), (through[len(prompt) :], True)]
            at = len(through)
        return [*found, (text[at:], False)]

    def _texts(
        self, where: str, messages: Sequence[Mapping[str, str]], prefixes: Any
    ) -> list[str]:
        request = {"messages": messages, "prefixes": prefixes}
        answer = self._ask(where, request)
        texts = answer.get("texts")
        if isinstance(texts, list) and all(isinstance(text, str) for text in texts):
            return texts
        raise DataError(
            f"{where}: the chat template {self._template.where} cannot write this "
            f"conversation: {answer.get('error')}"
        )

    def _ask(self, where: str, request: Mapping[str, Any]) -> Mapping[str, Any]:
        process = self._process = self._process or self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has said why
            process.stdin.write(_line(request))
            process.stdin.flush()
        answer = process.stdout.readline(_MOST_ANSWER_BYTES)
        try:
            found = json.loads(answer)
        except (ValueError, RecursionError):
            status = self._end(wait_s=10 if not answer else 0)
            why = "it ended without an answer"
            if status == -signal.SIGXCPU:
                why = f"it took more than {_MOST_CPU_S} s of processor time"
            raise DataError(
                f"{where}: the chat template {self._template.where} was stopped: {why}"
                "; use a template that you trust"
            ) from None
        return found if isinstance(found, dict) else {}

    def _started(self) -> "subprocess.Popen[bytes]":
        optional_import("jinja2", what=f"the chat template {self._template.where}")
        process = subprocess.Popen(
            [sys.executable, "-P", str(_RENDERER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        setup = {
            "template": self._template.text,
            "tokens": self._template.tokens,
            "most_cpu_s": _MOST_CPU_S,
            "most_memory_bytes": _MOST_MEMORY_BYTES,
        }
        assert process.stdin is not None
        process.stdin.write(_line(setup))
        return process

    def close(self) -> None:
        """Ends the process; idempotent."""
        if self._process is not None:
            self._end(wait_s=0)

    def _end(self, *, wait_s: float) -> int:
        """Returns the exit status; kills the process if it does not end by itself."""
        assert self._process is not None
        process, self._process = self._process, None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(wait_s)
        process.kill()
        with contextlib.suppress(BrokenPipeError), process:
            pass
        return process.returncode


def _line(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document).encode() + b"\n"
