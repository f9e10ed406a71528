"""The settings of one-shot clustering: signature, proximity, grouping, and when it happens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from rayfl.clustering.embeddings.base import Embedding
from rayfl.clustering.embeddings.none import NoEmbedding
from rayfl.clustering.linkage import Method
from rayfl.clustering.proximity import POINTS, PROXIMITIES
from rayfl.errors import nearest
from rayfl.settings import Registry, Section, choice
from rayfl.signatures.base import Signature
from rayfl.signatures.features.base import FeatureMap
from rayfl.signatures.features.identity import Identity
from rayfl.signatures.subspace import Subspace

SIGNATURES = Registry("signature", "rayfl.signatures", Signature)
FEATURES = Registry("feature map", "rayfl.signatures.features", FeatureMap)
EMBEDDINGS = Registry("embedding", "rayfl.clustering.embeddings", Embedding)

if TYPE_CHECKING:
    AnySignature = Signature
    AnyFeatureMap = FeatureMap
    AnyEmbedding = Embedding
else:
    AnySignature, AnyFeatureMap, AnyEmbedding = choice(SIGNATURES), choice(FEATURES), choice(EMBEDDINGS)

Grouping = Literal["hierarchical", "graph", "planted", "single", "singletons", "random"]


class Clustering(Section):
    """How clients are grouped by what they reveal about their data.

    The defaults are PACFL's (thesis Algorithm 7). ``threshold`` is its beta: degrees for angles, ``1 - R``
    for ``relevance``. A large threshold gives one cluster (FedAvg), a small one gives one cluster per client
    (SOLO). With neither a threshold nor a number of clusters, the tree proposes the number, and the run
    reports it.
    """

    signature: AnySignature = Field(Subspace(), description="what a client reveals about its data")
    features: AnyFeatureMap = Field(Identity(), description="feature map applied before the signature")
    embedding: AnyEmbedding = Field(
        NoEmbedding(),
        description="embedding of all signatures, computed by the server before it compares them",
    )
    proximity: str | None = Field(
        None, description="how signatures are compared; null: the signature's default"
    )
    grouping: Grouping = Field(
        "hierarchical",
        description="hierarchical: a tree that is cut; graph: clients within gamma are related, and "
        "related clients form clusters; planted: the true groups; single: one cluster; "
        "singletons: one cluster per client; random: n_clusters of equal size, or of the "
        "true groups' sizes",
    )
    linkage: Method = Field(
        "average", description="linkage of the hierarchical grouping, in SciPy's terms (graph: Ward)"
    )
    threshold: float | None = Field(None, ge=0, description="cut at this distance (beta)")
    gamma: Annotated[float, Field(ge=0)] | Literal["auto"] = Field(
        1.0,
        description="graph: clients are related up to this distance; auto: the distance whose graph "
        "has the clearest groups",
    )
    n_clusters: int | None = Field(None, ge=1, description="cut into this many clusters")
    exact_up_to: int = Field(
        30_000,
        ge=2,
        description="compare all pairs of up to this many clients (30,000 need 4.5 GB); more are "
        "clustered through representatives",
    )
    every: int = Field(
        0, ge=0, description="rounds between two clusterings (tau); 0: cluster once, at the start"
    )
    max_flags: int | None = Field(
        None,
        ge=0,
        description="cluster again when more than this many clients (lambda) have raised a flag "
        "because they are new or their data have changed; null: never",
    )
    flag_loss: float | None = Field(
        None,
        gt=0,
        description="a client also raises a flag when its training loss has risen by this fraction "
        "since it last took part; null: off",
    )
    flag_update: float | None = Field(
        None,
        gt=0,
        description="a client also raises a flag when the norm of its update has grown by this "
        "fraction since it last took part; null: off",
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Clustering:
        name, own = self.signature.name, self.signature.proximities
        if not isinstance(own, tuple | list) or not own or not set(own) <= set(PROXIMITIES):
            example = "proximities: ClassVar[Any] = ('euclidean',)"
            valid = f"expected some of {', '.join(PROXIMITIES)}, such as {example}"
            raise ValueError(f"{name}.proximities is {own!r}; {valid}")
        if self.proximity is not None and self.proximity not in self.signature.proximities:
            if self.proximity not in PROXIMITIES:
                raise ValueError(f"no proximity {self.proximity!r}; {nearest(self.proximity, PROXIMITIES)}")
            raise ValueError(
                f"proximity {self.proximity!r} cannot compare signatures {name!r}; "
                f"valid: {', '.join(self.signature.proximities)}"
            )
        if self.threshold is not None and self.n_clusters is not None:
            raise ValueError("threshold and n_clusters are both given; give one of them, or neither")
        if self.threshold is not None and self.grouping != "hierarchical":
            instead = "set gamma" if self.grouping == "graph" else "leave it out"
            raise ValueError(f"threshold has no meaning for grouping {self.grouping!r}; {instead}")
        if self.embedding.name != "none" and self.measure not in POINTS:
            raise ValueError(
                f"embedding {self.embedding.name!r} is for sets of points, not for signatures {name!r}; "
                "use signature centroids"
            )
        if self.features.name != "identity" and not self.signature.uses_features:
            raise ValueError(
                f"features {self.features.name!r} would do nothing: signatures {name!r} do not look at them; "
                "use features identity"
            )
        if self.n_clusters is not None and self.grouping not in ("hierarchical", "graph", "random"):
            raise ValueError(f"n_clusters has no meaning for grouping {self.grouping!r}; leave it out")
        return self

    @property
    def measure(self) -> str:
        """The proximity in use: ``proximity``, or the signature's default."""
        return self.proximity if self.proximity is not None else self.signature.proximities[0]

    @property
    def public_samples(self) -> int:
        """Number of samples that the server needs, for its feature map or for models to predict."""
        if not self.needs_signatures:
            return 0
        return max(self.features.public_samples, self.signature.public_samples)

    @property
    def needs_signatures(self) -> bool:
        """Whether clients have to compute signatures at all."""
        return self.grouping in ("hierarchical", "graph")

    @property
    def needs_groups(self) -> bool:
        """Whether the true groups have to be known."""
        return self.grouping == "planted" or (self.grouping == "random" and self.n_clusters is None)

    @property
    def pairwise(self) -> bool:
        """Whether the distance of two clients follows from their signatures alone, as they were sent."""
        return self.needs_signatures and not (self.signature.needs_exchange or self.embedding.joint)

    def again(self) -> Clustering:
        """The settings for clustering again; encoders may be fine-tuned once more."""
        return self.model_copy(update={"features": self.features.again()})

    def for_clients(self, number: int) -> Clustering:
        """The settings for this many clients: with fewer than ``n_clusters``, each is a cluster."""
        if self.n_clusters is None or self.n_clusters <= number:
            return self
        return self.model_copy(update={"n_clusters": number})

    def at(self, threshold: float | None) -> Clustering:
        """The settings that cut the tree at this distance, if there is one."""
        if threshold is None:
            return self
        return self.model_copy(update={"threshold": threshold, "n_clusters": None})
