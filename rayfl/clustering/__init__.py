"""How signatures compare, and how proximities become clusters."""
