"""Who may use the broker, and what a token may do. Begin with ``vouching.py`` and ``scopes.py``.

``NotVouched`` says that an owner may not use the broker, ``QuotaReached`` that the owner has the maximum of something.
A reason or a name that is too long or contains control characters is a ``ValidationError``.
"""
