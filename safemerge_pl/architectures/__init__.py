"""How families of models name and lay out their layers."""
