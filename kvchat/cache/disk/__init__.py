"""The disk tier: packs of KV in files that outlive the process, bounded and shared by processes."""
