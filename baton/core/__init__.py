"""Values: identifiers, hashes, layouts, configuration, parameters, errors.

Imports nothing but the standard library and msgspec; reads no clock; holds no state.
"""
