"""The options that replace single costs of a plan."""

from dataclasses import dataclass, replace

from svdpp.cli.options.declare import COSTS, setting
from svdpp.plan.costs import Costs


@dataclass(frozen=True, kw_only=True)
class SecondsOptions:
    """Costs that replace those of `--costs`; None keeps theirs."""

    step_seconds: float | None = setting(
        COSTS, "SECONDS", "Time of one step, above 0.", shown="that of --costs"
    )
    encode_seconds: float | None = setting(
        COSTS, "SECONDS", "Time of one clip's encode.", shown="that of --costs"
    )
    decode_seconds: float | None = setting(
        COSTS, "SECONDS", "Time of one clip's decode.", shown="that of --costs"
    )
    transfer_seconds: float | None = setting(
        COSTS, "SECONDS", "Latency of one transfer from rank to rank.", shown="that of --costs"
    )
    inter_host_transfer_seconds: float | None = setting(
        COSTS,
        "SECONDS",
        "Latency of one transfer to a rank on another host. A plan over several hosts "
        "needs it, here or in the costs.",
        shown="that of --costs",
    )

    def applied(self, costs: Costs, *, ranks_per_host: int | None) -> Costs:
        """`costs` with the given values in place of theirs, for hosts of `ranks_per_host` ranks."""
        given = {name: value for name, value in vars(self).items() if value is not None}
        if ranks_per_host is not None:
            given["ranks_per_host"] = ranks_per_host
        return replace(costs, **given)
