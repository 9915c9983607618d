"""The disk tier: KV packs in files with a size limit, shared by processes and kept across runs."""
