"""Which pairs of live models can be mapped, and by which artifact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from mapper.artifact import Artifact, KVMap
from mapper.errors import BadArtifact, UnsupportedModel
from mapper.service.pages import ModelPages
from mapper.service.protocol import Pair
from mapper.spec import ModelSpec
from mapper.store import DirectoryStore

log = structlog.get_logger()


@dataclass(frozen=True)
class LoadedArtifact:
    """An artifact ready to run; `refused` artifacts are kept as their reason only."""

    folder: Path
    artifact: Artifact
    map: KVMap


class Pairs:
    """Artifacts by direction, held against the models that are live right now.

    Args:
        store: where workers announce themselves.
        folders: artifact folders; a damaged one is refused, and the others served.

    `refused` maps the folders that could not be loaded to the reason.
    """

    def __init__(self, store: DirectoryStore, folders: Sequence[Path], device: str) -> None:
        self._store = store
        self._loaded: list[LoadedArtifact] = []
        self.refused: dict[str, str] = {}
        for folder in folders:
            try:
                artifact = Artifact.load(folder)
                self._loaded.append(LoadedArtifact(folder, artifact, artifact.compile(device)))
            except BadArtifact as error:
                self.refused[str(folder)] = str(error)
                log.error("artifact_refused", folder=str(folder), reason=str(error))

    def live(self) -> dict[str, ModelPages]:
        """The models that workers announced, by served name; the latest announcement wins."""
        models = {}
        for description in self._store.announced():
            spec = ModelSpec.model_validate(description["spec"])
            models[spec.name] = ModelPages(self._store, spec, int(description["tp_size"]))
        return models

    def find(self, source: ModelSpec, target: ModelSpec) -> LoadedArtifact:
        """The artifact for this direction.

        Raises:
            UnsupportedModel: none fits; `field` is the first field in which the closest
                one differs from the live workers, or `artifact` when there is none.
        """
        refusal = None
        for loaded in self._loaded:
            try:
                loaded.artifact.check(source, target)
                return loaded
            except UnsupportedModel as error:
                manifest = loaded.artifact.manifest
                same_direction = (manifest.source.name, manifest.target.name) == (
                    source.name,
                    target.name,
                )
                if same_direction or refusal is None:
                    refusal = error
        raise refusal or UnsupportedModel("artifact", "no artifact is loaded")

    def list(self) -> list[Pair]:
        models = self.live()
        pairs = []
        for source in models.values():
            for target in models.values():
                if source.spec.name == target.spec.name:
                    continue
                direction = {"source": source.spec.name, "target": target.spec.name}
                try:
                    loaded = self.find(source.spec, target.spec)
                except UnsupportedModel as error:
                    pairs.append(
                        Pair(
                            **direction,
                            status="unsupported",
                            field=error.field,
                            detail=error.reason,
                        )
                    )
                else:
                    pairs.append(
                        Pair(
                            **direction,
                            status="ready",
                            artifact=str(loaded.folder),
                            quality=loaded.artifact.manifest.quality,
                        )
                    )
        return pairs
