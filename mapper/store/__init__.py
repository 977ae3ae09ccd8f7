"""The page store: KV-cache pages shared by the workers and the mapper of one node."""

from mapper.store.base import PageStore
from mapper.store.directory import DirectoryStore
from mapper.store.page import PageLayout, Provenance

__all__ = ["DirectoryStore", "PageLayout", "PageStore", "Provenance"]
