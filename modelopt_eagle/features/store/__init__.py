"""The store: safetensors shards and a manifest, whole after a kill at any byte."""

from modelopt_eagle.features.store.codec import STORAGE_DTYPES, bytes_per_token
from modelopt_eagle.features.store.reader import StoreReader
from modelopt_eagle.features.store.writer import SHARD_BYTES, StoreWriter, dataset_hash

__all__ = ["SHARD_BYTES", "STORAGE_DTYPES", "StoreReader", "StoreWriter", "bytes_per_token", "dataset_hash"]
