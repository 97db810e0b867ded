"""Runtime patches of upstream defects, one module each (see patches/README.md). Importing this
package patches nothing."""
