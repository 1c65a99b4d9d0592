"""A net of one residual block: torch.compile takes time for every layer that it traces."""

from dataclasses import dataclass

from demur.images import Domain
from demur.nets import NetSpec
from demur.nets.architectures import ResidualTrunk


@dataclass(frozen=True)
class OneBlock(NetSpec):
    """The smallest net with every kind of layer of a ResNet."""

    def trunk(self, domain: Domain) -> ResidualTrunk:
        return ResidualTrunk(domain.shape[0], 4, [8], depth=1)
