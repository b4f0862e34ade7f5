"""`--device NAME` of the commands that reckon for a GPU which is not here."""

from __future__ import annotations

from typing import Any

import click


class DeviceName(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.4 on only
    """The table's name of a device, however it was typed; what it is taken for where that is not plain, said aloud."""

    name = "device"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from memopt.cli.shared.console import say
        from memopt.devices import devices_called

        taken, *others = devices_called(value)
        if others:
            say(
                f"'{value}' is taken for {taken.name}; as much memory has {', '.join(row.name for row in others)}"
            )
        elif not taken.is_called(value):
            say(f"'{value}' is taken for {taken.name}")
        return taken.name
