"""The options that replace single costs of a plan."""

from dataclasses import dataclass, replace
from typing import Annotated

from svdpp.cli.options.declare import COSTS, option
from svdpp.plan.costs import Costs


@dataclass(frozen=True, kw_only=True)
class SecondsOptions:
    """Costs that replace those of `--costs`; None keeps theirs."""

    step_seconds: Annotated[
        float | None,
        option(
            "--step-seconds",
            panel=COSTS,
            metavar="SECONDS",
            help="Time of one step, above 0.",
            default="that of --costs",
        ),
    ] = None
    encode_seconds: Annotated[
        float | None,
        option(
            "--encode-seconds",
            panel=COSTS,
            metavar="SECONDS",
            help="Time of one clip's encode.",
            default="that of --costs",
        ),
    ] = None
    decode_seconds: Annotated[
        float | None,
        option(
            "--decode-seconds",
            panel=COSTS,
            metavar="SECONDS",
            help="Time of one clip's decode.",
            default="that of --costs",
        ),
    ] = None
    transfer_seconds: Annotated[
        float | None,
        option(
            "--transfer-seconds",
            panel=COSTS,
            metavar="SECONDS",
            help="Latency of one transfer from rank to rank.",
            default="that of --costs",
        ),
    ] = None
    inter_host_transfer_seconds: Annotated[
        float | None,
        option(
            "--inter-host-transfer-seconds",
            panel=COSTS,
            metavar="SECONDS",
            help="Latency of one transfer to a rank on another host. A plan over several hosts "
            "needs it, here or in the costs.",
            default="that of --costs",
        ),
    ] = None

    def applied(self, costs: Costs, *, ranks_per_host: int | None) -> Costs:
        """`costs` with the given values in place of theirs, for hosts of `ranks_per_host` ranks."""
        given = {name: value for name, value in vars(self).items() if value is not None}
        if ranks_per_host is not None:
            given["ranks_per_host"] = ranks_per_host
        return replace(costs, **given)
