"""The command line that is running, as one would type it again with other options."""

from __future__ import annotations

import shlex

import click


def typed_again(**changes: object) -> str:
    """`memopt estimate --device t4 train.py`: the running command with the options that were typed, those in `changes` set to the value
    there (True: a flag), or left out where that is None. What comes from the environment or a configuration file comes again by itself."""
    ctx = click.get_current_context()
    words, arguments = ["memopt", ctx.info_name or ""], list[str]()
    for param in ctx.command.params:
        name = param.name or ""
        typed = ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        value = changes.get(name, ctx.params[name] if typed else None)
        several = value if isinstance(value, tuple) else () if value is None else (value,)
        if isinstance(param, click.Argument):
            arguments += map(str, several)
            continue
        flag = max(param.opts, key=len)
        for each in several:
            if isinstance(each, bool):
                words.append(flag if each else param.secondary_opts[0])
            elif str(each).startswith("-"):
                words.append(f"{flag}={each}")
            else:
                words += [flag, f"{each:g}" if isinstance(each, float) else str(each)]
    return shlex.join([*words, *arguments])
