"""The process that renders a chat template; `chat.py` starts it and reads its answers.

    first line   {"template", "tokens", "most_cpu_s", "most_memory_bytes"}
    then lines   {"messages", "prefixes": [[num_messages, is_prompt], …]}
    answers      {"texts": […]} or {"error": "…"}

Invariant: a template is a stranger's code. It runs in Jinja's immutable sandbox, in a
process that the kernel lets write no files, and ends when a conversation takes too much
processor time. The module imports nothing of jaxinf, so the process starts in a tenth
of a second.
"""

import itertools
import json
import math
import resource
import sys

_MOST_TIMES, _LEAST_CHARACTERS = 16, 1 << 20


def main():
    """Renders each line of standard input until it ends."""
    setup = json.loads(sys.stdin.readline())
    try:
        template = _compiled(setup)
    except Exception as error:
        _answer({"error": _text(error)})
        return
    for line in sys.stdin:
        _limit_cpu(setup["most_cpu_s"])
        try:
            _answer({"texts": _texts(template, json.loads(line), setup["tokens"])})
        except Exception as error:  # a template may raise anything
            _answer({"error": _text(error)})


def _compiled(setup):
    from jinja2 import ext, sandbox

    class Generation(ext.Extension):
        """``{% generation %}``, by which other tools find answers, is left out."""

        tags = {"generation"}  # noqa: RUF012 - as Jinja has it

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message):
        raise ValueError(message)

    memory_bytes = setup["most_memory_bytes"]
    for kind, most in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))
    _limit_cpu(setup["most_cpu_s"])
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[ext.loopcontrols, Generation],
    )
    environment.filters["tojson"] = _to_json
    # The same text each time: a resumed run must see the same tokens.
    del environment.filters["random"], environment.globals["lipsum"]
    environment.globals["raise_exception"] = refuse
    return environment.from_string(setup["template"])


def _limit_cpu(seconds):
    used = resource.getrusage(resource.RUSAGE_SELF)
    most = math.ceil(used.ru_utime + used.ru_stime) + seconds
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (most, hard))


def _texts(template, request, tokens):
    messages = request["messages"]
    most = _LEAST_CHARACTERS + _MOST_TIMES * len(json.dumps(messages))
    return [
        _rendered(template, tokens, messages[:count], is_prompt, most)
        for count, is_prompt in request["prefixes"]
    ]


def _rendered(template, tokens, messages, is_prompt, most):
    pieces, length = [], 0
    for piece in template.generate(
        **tokens,
        messages=messages,
        add_generation_prompt=is_prompt,
        tools=None,
        documents=None,
    ):
        length += len(piece)
        if length > most:
            raise ValueError(f"it writes more than {most} characters")
        pieces.append(piece)
    return "".join(pieces)


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _text(error):
    words = f"{type(error).__name__}: {error}"
    return "".join(itertools.islice(words, 500))


def _answer(document):
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
