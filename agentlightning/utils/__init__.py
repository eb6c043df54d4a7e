"""Tools that know nothing of rollouts, spans or stores, and could serve any program."""
