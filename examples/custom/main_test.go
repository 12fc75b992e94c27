package main

import (
	"testing"

	"github.com/soliton-train/soliton/trainer"
	"github.com/soliton-train/soliton/trainer/trainertest"
)

func TestSlopes(t *testing.T) {
	// Finite differences lie next to a bend, so the steps are small.
	trainertest.Layer(t, slopes{5}, trainer.Spec{Shape: []int{5}}, trainertest.Options{Step: 1e-3})
}
