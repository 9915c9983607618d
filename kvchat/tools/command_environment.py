"""The environment of a tool's commands: that of kvchat, without what looks like a secret.

It keeps secrets out of what a command prints or passes on. A command that looks for them finds them
all the same: it runs as the user, who may read the environment of all their processes.
"""

import re
from collections.abc import Collection, Mapping

_SECRET_NAME = re.compile(
    r"(?:^|_)(?:PASS|PAT|AUTH|CREDS?|PWD)(?:_|$)|KEYS?(?:_|$)|TOKENS?(?:_|$)"
    r"|SECRET|PASSW(?:OR)?D|PASSPHRASE|CREDENTIAL|COOKIE"
)
# An address with a password in it, such as that of a database.
_SECRET_VALUE = re.compile(r"://[^/\s@:]*:[^/\s@]+@")
_NO_SECRETS = frozenset({"PWD", "OLDPWD", "SSH_AUTH_SOCK"})


def secret_names(environment: Mapping[str, str], allowed: Collection[str] = ()) -> list[str]:
    """Return the variables that look like secrets, without those that are allowed."""
    return [
        name
        for name, value in environment.items()
        if name not in _NO_SECRETS
        and name not in allowed
        and (_SECRET_NAME.search(name.upper()) or _SECRET_VALUE.search(value))
    ]
