"""From a name in the configuration to what runs samples: `loading` finds the class, `parts` makes what it asks for."""
