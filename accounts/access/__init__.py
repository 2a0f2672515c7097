"""Who may use the broker, and what a token may do. Begin with ``vouching.py`` and ``scopes.py``.

``NotVouched`` says that an owner may not use the broker. A reached quota is a ``ValidationError``, and so is a reason
or name that is too long or contains control characters.
"""
