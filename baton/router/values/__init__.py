"""Values that all rooms of the router share: settings, identities, errors, members, request bodies."""
