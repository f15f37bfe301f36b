"""How ranks are started or joined, how they talk to the parent, and how processes end."""
