// Package elastic decides what happens when workers are lost, leave or join.
package elastic
