package zero

import "github.com/soliton-train/soliton/internal/compute/kernel"

// Update holds the numbers of one optimizer update.
type Update struct {
	Step      int     // from 1
	LR        float32 // learning rate
	GradScale float32 // multiplies every gradient first
}

// Rule is an optimizer: [AdamW] or [SGD].
type Rule interface {
	// Moments returns how many numbers of state a parameter has.
	Moments() int

	// prepare returns the function that updates one block.
	prepare(u Update) func(params []float32, moments [][]float32, grad []float32, t Tuning)
}

// Apply updates params and their moments in place.
func Apply(rule Rule, u Update, params []float32, moments [][]float32, grad []float32, t Tuning) {
	rule.prepare(u)(params, moments, grad, t)
}

// AdamW is the rule of [kernel.AdamW].
type AdamW struct{ Beta1, Beta2, Eps, WeightDecay float32 }

// Moments implements [Rule]: the means of the gradient and of its square.
func (AdamW) Moments() int { return 2 }

func (a AdamW) prepare(u Update) func(params []float32, moments [][]float32, grad []float32, t Tuning) {
	h := kernel.AdamWStep{
		Beta1:       a.Beta1,
		Beta2:       a.Beta2,
		Eps:         a.Eps,
		Correction1: float32(1 - power(float64(a.Beta1), u.Step)),
		Correction2: float32(1 - power(float64(a.Beta2), u.Step)),
		GradScale:   u.GradScale,
	}
	return func(params []float32, moments [][]float32, grad []float32, t Tuning) {
		h := h
		h.LR, h.WeightDecay = t.rate(u.LR), t.decay(a.WeightDecay)
		kernel.AdamW(params, moments[0], moments[1], grad, h)
	}
}

// After returns the rule for moments that have so many updates in them before step 1, as AdamW's corrections of their bias have to
// count.
func After(rule Rule, updates int) Rule {
	if a, ok := rule.(AdamW); ok && updates > 0 {
		return later{a, updates}
	}
	return rule
}

type later struct {
	AdamW
	before int
}

func (l later) prepare(u Update) func(params []float32, moments [][]float32, grad []float32, t Tuning) {
	u.Step += l.before
	return l.AdamW.prepare(u)
}

// power returns xⁿ by repeated squaring, which gives the same bits everywhere:
// the conversions keep the last product from being fused into what a caller
// does with it.
func power(x float64, n int) float64 {
	y := 1.0
	for ; n > 0; n >>= 1 {
		if n&1 == 1 {
			y = float64(y * x)
		}
		x = float64(x * x)
	}
	return y
}

// SGD is the rule of [kernel.SGD].
type SGD struct{ Momentum, WeightDecay float32 }

// Moments implements [Rule]: the momentum.
func (SGD) Moments() int { return 1 }

func (s SGD) prepare(u Update) func(params []float32, moments [][]float32, grad []float32, t Tuning) {
	h := kernel.SGDStep{Momentum: s.Momentum, GradScale: u.GradScale}
	return func(params []float32, moments [][]float32, grad []float32, t Tuning) {
		h := h
		h.LR, h.WeightDecay = t.rate(u.LR), t.decay(s.WeightDecay)
		kernel.SGD(params, moments[0], grad, h)
	}
}
