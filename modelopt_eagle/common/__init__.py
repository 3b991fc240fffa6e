"""The ground floor: knowledge that every room shares. Imports :mod:`modelopt_eagle.errors` only."""
